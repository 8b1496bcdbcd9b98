#!/bin/bash
# condor_ssh_to_job and `condor_submit -i`: a shell in the machine of the job $2. $1: its variables, as bash exports them.
. "$1"
enter=(@belljar@ exec --wait 1h --inherit-env)
if grep -q '^InteractiveJob = true' "$_CONDOR_JOB_AD"; then
    "${enter[@]}" "$2" -- true || exit
    kill -USR1 $_CONDOR_JOB_PIDS
    trap 'kill $_CONDOR_JOB_PIDS' EXIT
fi
[ ! -t 0 ] || enter+=(--tty)
"${enter[@]}" "$2" -- sh -c "${SSH_ORIGINAL_COMMAND:-! command -v bash >/dev/null || exec bash -l; exec sh -l}"
