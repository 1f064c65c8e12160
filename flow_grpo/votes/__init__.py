"""Human votes on pairs of images: durable store, HTTP server, web page and generation of pairs."""
