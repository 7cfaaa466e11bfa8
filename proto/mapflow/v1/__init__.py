"""Messages and stubs of the MapFlow cache protocol, generated from cache.proto beside this file by `make proto`."""
