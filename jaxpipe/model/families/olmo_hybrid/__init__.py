"""OLMo Hybrid: gated delta networks, and OLMo 2's attention without positions in some layers."""
