// A click on a picture opens it alone: charts can then be enlarged on a narrow screen.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  for (const picture of document.querySelectorAll("article img")) {
    // thumbnails of the gallery lead to their example
    if (picture.closest("a, .sphx-glr-thumbcontainer")) continue;
    const link = document.createElement("a");
    link.href = picture.src;
    link.title = "Open the picture alone";
    picture.replaceWith(link);
    link.append(picture);
  }
});
