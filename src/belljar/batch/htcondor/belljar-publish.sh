#!/bin/sh
# STARTD_CRON: what this node's slots say about machines.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
node=@node@
why=$(readlink @closed@) || case $(stat -c '%u %A' -- "$node") in
    '0 d'???????wt) ;;
    *) why="belljar: $node (paths.node) must be a folder of root's with mode 1777; belljar batch install htcondor makes it" ;;
esac
if [ -n "$why" ]; then
    echo '@works@ = False'
    printf '@reason@ = "%s"\n' "$(printf %s "$why" | tr -c ' !#-[]-~' '?')"
else
    echo '@works@ = True'
    echo '@reason@ = undefined'
fi
images=$(ls @names@ 2>/dev/null | grep -E '^[A-Za-z0-9][A-Za-z0-9._-]*$' | tr '\n' ',')
printf '@images@ = "%s"\n' "${images%,}"
echo '- update:true'
