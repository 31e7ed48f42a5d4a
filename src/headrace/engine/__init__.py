"""The embedded continuous-batching engine. Knows nothing of HTTP, tenants or caches."""
