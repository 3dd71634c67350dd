"""What is known of a plan that is being served: where its passes lie under the machine's roofs, and what would help."""
