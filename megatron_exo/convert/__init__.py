"""Reading and writing other formats of ExoFormer weights; every format is one table of names and layouts."""
