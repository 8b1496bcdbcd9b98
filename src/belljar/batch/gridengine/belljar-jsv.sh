#!/bin/sh
# Grid Engine's server starts this as its administrator for each of its threads, and again when this file changes:
# belljar @version@, @fingerprint@ of its program and the site's settings.
exec @belljar@ internal hook gridengine jsv --per-slot=@per_slot@
