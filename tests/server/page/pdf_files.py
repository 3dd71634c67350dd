"""Small PDFs, written by hand."""

from __future__ import annotations

FONT = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
# A font whose codes only a table outside the file turns into characters.
FONT_OF_A_TABLE = (
    "<< /Type /Font /Subtype /Type0 /BaseFont /Ryumin-Light /Encoding /90ms-RKSJ-H /DescendantFonts "
    "[<< /Type /Font /Subtype /CIDFontType0 /BaseFont /Ryumin-Light "
    "/CIDSystemInfo << /Registry (Adobe) /Ordering (Japan1) /Supplement 2 >> >>] >>"
)
LOCKED = f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'00' * 32}> /U <{'11' * 32}> >> /ID [<00> <00>]"


def pdf(*pages: str, font: str = FONT, trailer: str = "") -> bytes:
    """Return a PDF with a page for each text."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>", font]
    for number, text in enumerate(pages):
        drawn = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET" if text else "0 0 100 100 re f"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    body, places = "%PDF-1.7\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    end = f"trailer\n<< /Size {size} /Root 1 0 R {trailer} >>\nstartxref\n{len(body)}\n%%EOF\n"
    return f"{body}xref\n0 {size}\n0000000000 65535 f \n{table}{end}".encode("latin-1")
