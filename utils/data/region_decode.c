/* Decode the part of a JPEG file that a crop shows, with libjpeg-turbo: see region_decode.py beside this.
 *
 * Blocks above and beside the part are only entropy-decoded, and nothing after its last row is
 * decoded: see "Partial image decompression" in libjpeg-turbo's libjpeg.txt.
 */
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#define MARGIN 2 /* pixels: colour is interpolated between neighbours, each of them two wide */
#define AT_ONCE 4

struct faults {
    struct jpeg_error_mgr manager; /* first: libjpeg passes a pointer to it */
    jmp_buf back;
};

static void give_up(j_common_ptr jpeg) { longjmp(((struct faults *)jpeg->err)->back, 1); }

/* The caller decodes a damaged file whole, so that all nodes get the same pixels. */
static void on_message(j_common_ptr jpeg, int level) {
    if (level < 0) give_up(jpeg);
}

/* Whether the next significant marker is the end of the image: with another one, in a damaged
 * file, decoding the whole image may fail. */
static int ends_well(j_decompress_ptr jpeg) {
    const unsigned char *at = jpeg->src->next_input_byte;
    size_t left = jpeg->src->bytes_in_buffer;
    int marker = jpeg->unread_marker;
    while (marker == 0 || marker == 0xFF || (marker >= JPEG_RST0 && marker <= JPEG_RST0 + 7)) {
        const unsigned char *next = left > 1 ? memchr(at, 0xFF, left - 1) : NULL;
        if (!next) return 1; /* cut off, which all decoders accept */
        left -= next + 1 - at;
        at = next + 1;
        marker = *at;
    }
    return marker == JPEG_EOI;
}

/* Decode the rows `top` to `top` + `height` of the file `data` into `out`, RGB, `stride` bytes each.
 *
 * They hold the columns `*left` to `*left` + `width` and some beside them; `*left` becomes the first.
 * Returns 0, or 1 if the file is damaged or too small.
 */
int decode_region(const unsigned char *data, unsigned long size, unsigned top, unsigned height,
                  unsigned *left, unsigned width, unsigned char *out, unsigned long stride) {
    struct jpeg_decompress_struct jpeg;
    struct faults faults;
    memset(&jpeg, 0, sizeof jpeg);
    jpeg.err = jpeg_std_error(&faults.manager);
    faults.manager.error_exit = give_up;
    faults.manager.emit_message = on_message;
    if (setjmp(faults.back)) {
        jpeg_destroy_decompress(&jpeg);
        return 1;
    }
    jpeg_create_decompress(&jpeg);
    jpeg_mem_src(&jpeg, (unsigned char *)data, size);
    jpeg_read_header(&jpeg, TRUE);
    jpeg.out_color_space = JCS_RGB;
    jpeg_start_decompress(&jpeg);
    if (top > jpeg.output_height || height > jpeg.output_height - top ||
        *left > jpeg.output_width || width > jpeg.output_width - *left)
        give_up((j_common_ptr)&jpeg);

    JDIMENSION first = *left > MARGIN ? *left - MARGIN : 0;
    JDIMENSION last = *left + width + MARGIN;
    JDIMENSION columns = (last < jpeg.output_width ? last : jpeg.output_width) - first;
    jpeg_crop_scanline(&jpeg, &first, &columns); /* moves first to the edge of a block */
    if (3UL * columns > stride) give_up((j_common_ptr)&jpeg);

    JDIMENSION above = top > MARGIN ? top - MARGIN : 0;
    if (above) jpeg_skip_scanlines(&jpeg, above);
    JSAMPROW rows[AT_ONCE];
    while (jpeg.output_scanline < top) { /* the margin, which the first row overwrites */
        rows[0] = out;
        jpeg_read_scanlines(&jpeg, rows, 1);
    }
    for (unsigned done = 0; done < height; done = jpeg.output_scanline - top) {
        unsigned number = height - done < AT_ONCE ? height - done : AT_ONCE;
        for (unsigned row = 0; row < number; row++) rows[row] = out + (done + row) * stride;
        jpeg_read_scanlines(&jpeg, rows, number);
    }
    if (!ends_well(&jpeg)) give_up((j_common_ptr)&jpeg);
    *left = first;
    jpeg_destroy_decompress(&jpeg);
    return 0;
}
