#!/usr/bin/env bash
# {{ what }}
#
# Each task of the array is a run of the sweep. Submitted once more, it does what is left.
#SBATCH --array=0-{{ members - 1 }}{{ "%%%d" % at_once if at_once }}
{% include "options.sh" %}
{% include "resources.sh" %}
{% include "environment.sh" %}

{% include "come_back.sh" %}

srun --kill-on-bad-exit=0 {{ command | words }} --run="$SLURM_ARRAY_TASK_ID" &
await $!
finish $?
