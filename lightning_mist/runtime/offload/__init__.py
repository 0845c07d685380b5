"""What is kept in host memory and comes to the device for as long as it is used."""
