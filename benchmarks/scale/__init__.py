"""The protocols of members, simulated: worlds larger than this machine (`docs/scale.md`)."""
