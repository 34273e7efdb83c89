"""The torch back end: the same shards on an NVIDIA GPU. The only package that imports torch; nothing imports it but `factory`."""
