"""The methods that NUFILT is compared with, under the protocol that it runs under."""

from .fusionbench import BatchMethodBaseline, ContinualMethodBaseline

__all__ = ["BatchMethodBaseline", "ContinualMethodBaseline"]
