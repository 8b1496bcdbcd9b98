#!/bin/sh
# HOOK_PREPARE_JOB, as the job's user. A hook that fails holds the job; this one leaves the decision to the wrapper then.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
told=$(timeout -k 5 @deadline@ @belljar@ internal hook htcondor prepare) && [ -n "$told" ] && printf '%s\n' "$told"
exit 0
