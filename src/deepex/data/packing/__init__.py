"""How a dataset is packed: which samples go where, in which form, by whom; `deepex.data.pack` is the way in."""
