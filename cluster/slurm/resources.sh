#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node=1
{% if cpus %}
#SBATCH --cpus-per-task={{ cpus }}
{% endif %}
{% if memory_gb %}
#SBATCH --mem={{ memory_gb }}G
{% endif %}
{% if devices %}
#SBATCH --gpus-per-node={{ devices }}
{% endif %}
{% for option in network.sbatch %}
#SBATCH {{ option }}
{% endfor %}
