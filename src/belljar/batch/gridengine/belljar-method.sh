#!/bin/sh
# Methods of Grid Engine's queues, as the job's owner: suspend|resume|terminate PID; if belljar fails, as without it.
# What announces an end (`qsub -notify`, s_cpu) reaches this process, too, and a method that died is not started again.
trap '' HUP INT QUIT TERM USR1 USR2 XCPU
# A resume that overtakes its suspend would leave the job halted.
case $1 in terminate) first= ;; *) first="flock -w 10 /proc/$2" ;; esac
$first @belljar@ internal hook gridengine "$1" "$2" "$SGE_JOB_SPOOL_DIR" && exit 0
case $1 in suspend) signal=STOP ;; resume) signal=CONT ;; *) signal=KILL ;; esac
kill -s $signal -- "-$2"
exit 0
