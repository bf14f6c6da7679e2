"""How kvatlas is run and watched: Prometheus, Alertmanager, Grafana. Nothing of the product imports this."""
