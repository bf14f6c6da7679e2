"""What is drawn in the browser: each module of components/ as a Streamlit component.

Owns the loader: a few lines that import a module from our own routes, under a path that holds a digest of
all modules, so that they are cached for ever and never mixed with those of another version.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import streamlit as st

from dashboard import process
from dashboard.live_route import assets_digest
from dashboard.theme import PALETTE

LOADER = """
export default function (component) {
  const { data, parentElement } = component;
  let leave = null, isGone = false;
  import(`${location.origin}${data.base}/${data.digest}/${data.module}`)
    .then((module) => { if (!isGone) leave = module.mount(component); })
    .catch((error) => { parentElement.append(`The map's script did not load: ${error.message}`); });
  return () => { isGone = true; leave?.(); };
}
"""

digest = cache(assets_digest)


def mount(
    module: str,
    data: Mapping[str, Any],
    *,
    key: str,
    on_picked: Callable[[], None] | None = None,
    on_looked: Callable[[], None] | None = None,
) -> Any:
    """Draws a module with `data`. What a person picks there is in the result's `picked`, and another way to
    look at it (colour, layout, order) in `looked`."""
    name = f"kvatlas_{module.removesuffix('.js')}"
    component = st.components.v2.component(name, js=LOADER)
    told = {
        "base": f"{process.config().prefix}/live",
        "digest": digest(),
        "module": module,
        "palette": PALETTE,
        **data,
    }
    return component(
        key=key, data=told, on_picked_change=on_picked or _ignore, on_looked_change=on_looked or _ignore
    )


def _ignore() -> None:
    """A trigger needs somebody to tell."""
