"""How many files and calls of Penstock one piece of work passes: a block, a layer, a chat.

| module     | holds                                                                      |
|------------|----------------------------------------------------------------------------|
| `counting` | counts in every process of a command, by `sys.setprofile`, when it is told  |
| `walks`    | the three pieces of work                                                   |

    lab walks
"""
