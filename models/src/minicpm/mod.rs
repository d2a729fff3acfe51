//! MiniCPM-V 2.6 and the vision + text path of MiniCPM-o 2.6.
