"""Which host a request goes to: the one that its episode was at, unless that is busier, else the less busy of two."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

SLACK = 4
"""So many more generations than twice the other's an episode's own host may have: its prefixes and screenshots are there."""


def pick(loads: Mapping[str, int], home: str | None, random: Random) -> str:
    """Name of the host to ask.

    loads: generations in flight of each host that may be asked, at least one.  home: where the episode was before, if it
    was anywhere.  Two choices: M. Mitzenmacher, "The power of two choices in randomized load balancing" (2001); every client
    asking the least loaded host, by figures a second old, would send them all to one.
    """
    names = sorted(loads)
    drawn = random.sample(names, min(2, len(names)))
    best = min(drawn, key=loads.__getitem__)
    if home is not None and home in loads and loads[home] <= 2 * loads[best] + SLACK:
        return home
    return best
