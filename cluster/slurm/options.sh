#SBATCH --job-name={{ name }}
#SBATCH --output={{ logs }}/%x-{{ "%A_%a" if array else "%j" }}.log
# A job that comes back goes on in the same log.
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --time={{ time }}
# So many seconds before the time limit the processes, not this script, are asked to stop.
#SBATCH --signal=TERM@{{ grace_s }}
{% for option in sbatch %}
#SBATCH {{ option }}
{% endfor %}
