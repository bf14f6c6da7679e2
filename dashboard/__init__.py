"""Eyes: a Streamlit process that shows the KV cache. Speaks gRPC to the service and to nothing else."""
