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

st.set_page_config(page_title="kvatlas", page_icon=str(HERE / "icon.png"), layout="wide")
st.html(HERE / "page.css")
process.live_pages()
note_tab()
pages = [
    st.Page(HERE / "views" / f"{name}.py", title=title, url_path=name, default=name == "page_map")
    for name, title in VIEWS
]
shown = st.navigation(pages, position="top")
st.html(f'<h1 class="kvatlas-view">{shown.title}</h1>')
shown.run()
