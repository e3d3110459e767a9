# docker buildx bake [cpu|cuda]: the two images, and what of the Dockerfile's arguments they differ in.
variable "REGISTRY" {
  default = ""
}

variable "VERSION" {
  default = "0.1.0"
}

group "default" {
  targets = ["cpu"]
}

target "cpu" {
  args = { DEVICE = "cpu" }
  tags = ["${REGISTRY}planaria:${VERSION}-cpu"]
}

target "cuda" {
  args = { DEVICE = "cuda" }
  tags = ["${REGISTRY}planaria:${VERSION}-cuda"]
}
