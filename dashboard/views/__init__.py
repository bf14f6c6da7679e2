"""One file per view. Streamlit runs them; nothing imports them but what is in them."""
