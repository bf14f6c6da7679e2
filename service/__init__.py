"""The service: text, clients and routing. Runs without torch."""
