"""What a decoder layer may have in place of plain attention: latent attention, or layers that keep states."""
