"""The script that Streamlit runs for each browser: navigation only."""

from pathlib import Path

import streamlit as st

from dashboard import process
from dashboard.view_parts import note_tab

HERE = Path(__file__).parent
VIEWS = (
    ("page_map", "Live map"),
    ("requests", "Requests"),
    ("prefix_tree", "Prefix tree"),
    ("what_if", "What if"),
    ("timeline", "Timeline"),
    ("integrity", "Integrity"),
    ("playground", "Playground"),
    ("explain", "How it works"),
)

# A fragment's run that crosses a change of the view can reach the browser behind it. Streamlit then loses its
# whole tree and shows nothing more (streamlit#9617, streamlit#15084), so the view is loaded again.
RELOAD = """<script>
window.kvatlasReload ??= addEventListener("error", ({ message }) => {
  if (/Bad delta path index|Cannot set a node at a delta path/.test(message)) location.reload();
}) ?? true;
</script>"""

st.set_page_config(page_title="kvatlas", page_icon=str(HERE / "icon.png"), layout="wide")
st.html(HERE / "page.css")
process.live_pages()
note_tab()
pages = [
    st.Page(HERE / "views" / f"{name}.py", title=title, url_path=name, default=name == "page_map")
    for name, title in VIEWS
]
shown = st.navigation(pages, position="top")
st.html(f'<h1 class="kvatlas-view">{shown.title}</h1>{RELOAD}', unsafe_allow_javascript=True)
shown.run()
