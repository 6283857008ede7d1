"""Sluiceway: one inference engine as five services that talk gRPC."""

__version__ = "0.1.0"
