#!/bin/sh
# SCHEDD_CRON: the images that nodes of the pool have. $1: condor_status. Where the pool tells none, nothing is said.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
images=$("$1" -constraint 'size(@images@ ?: "") > 0' -af @images@ | tr ',' '\n' | grep -E '^[A-Za-z0-9][A-Za-z0-9._-]*$' |
    sort -u | tr '\n' ',')
if [ -n "$images" ]; then printf '@pool@ = "%s"\n' "${images%,}"; else echo '@pool@ = undefined'; fi
echo '- update:true'
