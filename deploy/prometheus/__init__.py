"""Scrape configuration, rules, and what proves the rules."""
