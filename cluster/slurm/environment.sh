set -u
cd {{ repository | sh }}
{% for variable in environment %}
export {{ variable.name }}={{ variable.value | sh }}
{% endfor %}
{% if devices %}
# One process has all devices that the job has on its host; under SLURM, JAX would give it one.
export JAX_LOCAL_DEVICE_IDS={{ range(devices) | join(",") }}
{% endif %}

# The address of this host at which other roles reach its devices.
address() {
{% if address_interface %}
    ip -4 -o addr show dev {{ address_interface | sh }} | awk '{ sub("/.*", "", $4); print $4; exit }'
{% else %}
    hostname -I | awk '{ print $1 }'
{% endif %}
}
export -f address
{% if network.path %}

if ! srun --kill-on-bad-exit=1 test -e {{ network.path | sh }}; then
    echo "a host of this job has no {{ network.path }}, which the network {{ network.name }} needs" >&2
    exit 2
fi
{% endif %}
