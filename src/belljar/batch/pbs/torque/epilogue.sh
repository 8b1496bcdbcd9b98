#!/bin/sh
# Made by `belljar batch install torque`: ends what is left of the job's machine.
if [ -n "$PBS_NODEFILE" ]; then
    rm -f "$PBS_NODEFILE@record@"
fi
@belljar@ internal epilog torque "$@" </dev/null >/dev/null 2>&1
exit 0
