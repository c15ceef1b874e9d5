"""Random layers to test with."""

import torch


def matrix_with_spectrum(d_o, d_i, spectrum, seed):
    """Return a random matrix ``(d_o, d_i)`` with the given singular values, float64."""
    generator = torch.Generator().manual_seed(seed)
    U = orthonormal(d_o, len(spectrum), generator)
    V = orthonormal(d_i, len(spectrum), generator)
    return U * spectrum @ V.mT


def orthonormal(d, k, generator):
    """Return a random matrix ``(d, k)`` with orthonormal columns, float64."""
    return torch.linalg.qr(torch.randn(d, k, generator=generator, dtype=torch.float64)).Q


def random_layer(d_o, d_i, seed, dtype=torch.float64):
    """Return the pretrained, merged and task weight of a layer; task vectors have full rank and are
    small.
    """
    generator = torch.Generator().manual_seed(seed)

    def gaussian(scale):
        return scale * torch.randn(d_o, d_i, generator=generator, dtype=torch.float64)

    theta_0 = gaussian(0.1)
    theta = theta_0 + gaussian(0.01)
    theta_t = theta_0 + gaussian(0.01)
    return theta_0.to(dtype), theta.to(dtype), theta_t.to(dtype)
