"""Dashboards from one Python source, and how Grafana is provisioned with them."""
