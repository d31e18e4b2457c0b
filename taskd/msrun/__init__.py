"""TaskD inside msrun, MindSpore's launcher: its call-backs as the agent's loop needs them."""
