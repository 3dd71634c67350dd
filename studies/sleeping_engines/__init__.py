"""How much of many engines' speed a server keeps: engines take real messages, but sleep instead of computing."""
