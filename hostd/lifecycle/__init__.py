"""What each lifecycle event of a container means (DESIGN 7): one place, called by the daemon's worker and by the hook.

`event` what happened · `records` what is remembered in /run between two events · `clearing` leftovers in cgroups ·
`gate` may it start · `side` a release of a container that does not run · `phases` which event does what.
"""
