"""HASS (HArmonizedSS/HASS): EAGLE-1's network, trained on its own features too.

Departures: those of `eagle`; the cross-entropy (0.1) and the Top-K loss (1, its last stage) are both taken
over the base's 10 most probable tokens, renormalised, which makes them one loss of weight 1.1.
"""

from __future__ import annotations

from specformer.drafts.eagle import Eagle
from specformer.drafts.interface import register


@register("hass")
class Hass(Eagle):
    """EAGLE-1 trained through three places of the chain, features detached between them."""

    label = "HASS (chain)"
    recipe = {**Eagle.recipe, "soft_labels": 10}
    trained_places = 3
    detached = True
    head_share = 1.1
