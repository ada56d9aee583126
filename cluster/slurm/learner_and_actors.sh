#!/usr/bin/env bash
# {{ what }}
#
# A heterogeneous job: its first group is the learner, every other one an actor.
{% if prefill %}
# The last one prefills prompts for the actors.
{% endif %}
{% macro visible(count) %}
{% if count and count != devices %}
export JAX_LOCAL_DEVICE_IDS={{ range(count) | join(",") }}; {% endif %}
{% endmacro %}
{% include "options.sh" %}
{% with nodes = hosts %}
{% include "resources.sh" %}
{% endwith %}
{% for actor in range(actors) %}
#SBATCH hetjob
{% with nodes = actor_hosts, network = actor_network, devices = actor_devices %}
{% include "resources.sh" %}
{% endwith %}
{% endfor %}
{% if prefill %}
#SBATCH hetjob
{% with nodes = 1, network = prefill_network, devices = prefill_devices %}
{% include "resources.sh" %}
{% endwith %}
{% endif %}
{% include "environment.sh" %}

{% include "come_back.sh" %}

srun --het-group=0 --kill-on-bad-exit=0 --wait=600 \
    bash -c 'exec "$@" --host="$(address)"' task {{ learner_command | words }} &
learner=$!
# An actor that fails is started again beside the others.
actors=()
for ((i = 0; i < {{ actors }}; i++)); do
    bash launch/supervise.sh srun --het-group=$((i + 1)) --kill-on-bad-exit=0 --wait=600 \
        bash -c '{{ visible(actor_devices) }}exec "$@" --host="$(address)"' task {{ actor_command | words }} --name="actor-$i" &
    actors+=($!)
done
{% if prefill %}
# Actors prefill by themselves while it is away.
bash launch/supervise.sh srun --het-group={{ actors + 1 }} --kill-on-bad-exit=0 --wait=600 \
    bash -c '{{ visible(prefill_devices) }}exec "$@" --host="$(address)"' task {{ prefill_command | words }} &
actors+=($!)
{% endif %}
await "$learner"
code=$?
# After the last step actors end by themselves; a learner that stopped leaves them nothing to do.
if [ "$code" -ne 0 ]; then
    kill -TERM "${actors[@]}" 2>/dev/null
    scancel --signal=TERM "$SLURM_JOB_ID"
fi
for actor in "${actors[@]}"; do
    await "$actor"
done
finish "$code"
