"""How models write calls of tools into their answers: one file a syntax, each of which reads text as it comes."""
