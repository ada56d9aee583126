#!/usr/bin/env bash
# {{ what }}
#
# Waits for the array, however its tasks ended (afterany). Its exit code is 1 if some did not finish.
#SBATCH --job-name={{ name }}
#SBATCH --output={{ logs }}/%x-%j.log
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=0:30:00
{% for option in sbatch %}
#SBATCH {{ option }}
{% endfor %}
set -u
cd {{ repository | sh }}
exec {{ command | words }} --jobs=0
