#!/usr/bin/env bash
# {{ what }}
#
# Each task of the array is an actor: more of them may be submitted at any time (--first_actor), and
# scancel lets one go.
#SBATCH --array={{ first }}-{{ last }}
{% include "options.sh" %}
{% include "resources.sh" %}
{% include "environment.sh" %}

{% include "come_back.sh" %}

srun --kill-on-bad-exit=0 --wait=600 \
    bash -c 'exec "$@" --name="actor-$SLURM_ARRAY_TASK_ID" --host="$(address)"' task {{ command | words }} &
await $!
finish $?
