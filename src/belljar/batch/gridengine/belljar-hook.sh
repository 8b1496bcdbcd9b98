#!/bin/sh
# Prolog and epilog of Grid Engine's queues, as root: prolog|epilog JOB TASK OWNER. The environment is the job's and is
# not taken over. The exit code is always 0: with any other one Grid Engine closes the queue.
/usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin SGE_ROOT=@root@ SGE_CELL=@cell@ \
    timeout -k 5 @deadline@ @belljar@ internal "$1" gridengine "$2" "$3" "$4" </dev/null >/dev/null 2>&1 || :
exit 0
