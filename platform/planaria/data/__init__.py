"""Sources, global order, encoding and collation of image-text samples."""
