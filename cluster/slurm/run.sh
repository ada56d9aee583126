#!/usr/bin/env bash
# {{ what }}
{% include "options.sh" %}
{% include "resources.sh" %}
{% include "environment.sh" %}

{% include "come_back.sh" %}

# A process that ends with an error leaves the others the time to end by themselves.
srun --kill-on-bad-exit=0 --wait=600 \
    {{ "bash -c 'exec \"$@\" --host=\"$(address)\"' task " if host }}{{ command | words }} &
await $!
finish $?
