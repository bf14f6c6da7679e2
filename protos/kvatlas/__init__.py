"""What everyone shares: the generated contract, the client library, the command line and model files."""
