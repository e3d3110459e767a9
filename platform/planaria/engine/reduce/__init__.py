"""How gradients, or parameters, of data-parallel replicas are joined across the slow links between them."""
