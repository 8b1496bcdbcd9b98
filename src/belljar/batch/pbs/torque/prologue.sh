#!/bin/sh
# Made by `belljar batch install torque`: tells the job's wrapper what the job asked for, and makes the user's folder of this node.
umask 022
if [ -n "$PBS_NODEFILE" ]; then
    printf '%s\n%s\n' "$5" "$6" >"$PBS_NODEFILE@record@"
fi
@belljar@ internal prolog torque "$@" </dev/null >/dev/null 2>&1
exit 0
