"""What each lifecycle event of a container means (DESIGN 7): one place, called by the daemon's worker and by the hook.

`event` what happened · `phases` which event does what: `starting` `stopping`, on what `handling` knows and says · `here`
all of it in the hook's own process · `releasing` the release that an event leads to · `side` a release of a container that
does not run · `clearing` leftovers in cgroups · `gate` may it start · `records` what is remembered in /run between two
events, `snapshot` what pre-stop puts there · `invocation` which run of the unit it is.
"""
