"""Three problems of the zoo in JAX: what hdet.jax finds, against a sweep and against torch."""
